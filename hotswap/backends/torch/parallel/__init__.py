"""Serves a model with several processes: tensor parallel within a stage, pipeline parallel across stages."""
