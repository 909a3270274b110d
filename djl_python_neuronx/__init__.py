"""Serves large language models on AWS Inferentia2 and Trainium, or on a CPU."""


def __getattr__(name: str) -> str:
    """`__version__`, read when it is asked for: an import of the package costs nothing."""
    if name == "__version__":
        from djl_python_neuronx.artifacts.manifest import package_version

        return package_version()
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
