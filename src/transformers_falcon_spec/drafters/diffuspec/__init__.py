"""DiffuSpec: diffusion models as drafters, with a search for the path that reads best (arXiv 2510.02358)."""
