"""The public names, ``init``, and calls dispatched by the type of a tensor: on top of the bindings."""
