"""Runs delegate payloads on MLX, inside ExecuTorch's runtime or called directly."""
