"""inventory.toml -> frozen dataclasses."""
