"""Fixtures that start DJL's released engine."""

from __future__ import annotations

import os

import pytest

from tests.djl.java import Java, MavenError, compile_driver, missing_programs


@pytest.fixture(scope="session")
def class_path(tmp_path_factory):
    """The class path of the driver. In CI everything that is missing is a failure."""
    why = missing_programs()
    if why is None:
        try:
            return compile_driver(tmp_path_factory.mktemp("classes"))
        except MavenError as error:
            why = str(error)
    return pytest.fail(why) if os.environ.get("CI") == "true" else pytest.skip(why)


@pytest.fixture(scope="session")
def engine_cache(tmp_path_factory):
    """The folder into which Java unpacks its Python engine, for all JVMs."""
    return tmp_path_factory.mktemp("djl")


@pytest.fixture(scope="session")
def start_java(class_path, engine_cache):
    """Start a JVM; the caller closes it."""

    def start(environ=None):
        return Java(class_path, engine_cache, environ)

    return start
