"""Engines and stores over foreign libraries; import each by its own path."""
