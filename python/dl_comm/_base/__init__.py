"""Needs nothing but the core: errors, checks, the table of collectives, settings, names of variables."""
