"""The program of the server's children."""

__import__("sitecustomize").run(globals())
