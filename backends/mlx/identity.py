"""The names under which ExecuTorch knows the delegate."""

UPSTREAM_BACKEND_ID = "MLXBackend"
"""The id and wire format of ExecuTorch's own MLX delegate; programs with this id run in either runtime."""

PLUGIN_BACKEND_ID = "MLX_Plugin"
"""This package's own id. As long as the other one, so that re-tagging a program replaces bytes in place."""

BACKEND_IDS = (UPSTREAM_BACKEND_ID, PLUGIN_BACKEND_ID)
