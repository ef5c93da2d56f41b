"""What an exported model's folder holds besides the tokenizer's files."""

MODEL_FILE = "model.pte"
