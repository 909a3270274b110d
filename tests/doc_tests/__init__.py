"""The doc-test runner: it runs what the docs show. `python -m tests.doc_tests [PAGE...]`; CONTRIBUTING.md has the marks.

`blocks` reads pages, `machine` is where a page's commands run, `page` runs them, `stand_ins` are programs of that
machine.
"""
