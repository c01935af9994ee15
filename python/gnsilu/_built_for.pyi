"""Written by the build beside the libraries: what can be asked before they are loaded."""

torch_version: str
