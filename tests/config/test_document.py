"""The generated pages promise only what is there."""

import re

from djl_python_neuronx.config import document
from djl_python_neuronx.config.legacy import IGNORED, UNSUPPORTED


def test_the_pages_name_no_command_that_does_not_exist():
    for page in (document.options_page(), document.example_file()):
        assert set(re.findall(r"djl-neuronx (\w+)", page)) <= {"serve"}


def test_every_name_that_is_accepted_is_on_the_page():
    page = document.options_page()
    for name in (*IGNORED, *UNSUPPORTED):
        assert f"| `{name}` |" in page
