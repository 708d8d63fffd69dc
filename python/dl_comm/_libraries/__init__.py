"""The op libraries of frameworks: found, built, loaded."""
