"""The demo: three models that recite by heart, served on fewer engines than there are models."""
