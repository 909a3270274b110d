"""The doc-test runner: it runs the commands of the docs. `python -m tests.doc_tests [PAGE...]`; CONTRIBUTING.md: how.

`blocks` reads pages, `machine` is where a page's commands run, `page` runs them, `stand_ins` are programs of that
machine.
"""
