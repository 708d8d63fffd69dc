"""Groups, collectives, messages and objects on NumPy and GPU arrays; what every binding shares."""
