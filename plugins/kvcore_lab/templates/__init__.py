"""Packages of plugins to begin with: `package.py` writes them, and the others are in them."""
