"""One model on several processes: tensor parallel within a stage, pipeline parallel across stages."""
