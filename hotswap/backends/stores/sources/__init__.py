"""What models are imported from: safetensors and GGUF files, directories, and repositories of the Hub."""
