"""A multi-turn tool agent whose turns are drafted from history; see README.md."""
