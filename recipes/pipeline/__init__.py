"""Three training stages in one script: see `recipes.pipeline.__main__`."""
