"""The demo: three models, each overfit to one text, on fewer engines than models."""
