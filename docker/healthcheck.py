#!/opt/venv/bin/python
"""Exit with 0 if /ping answers 200 on the port that SageMaker gave, or 8080."""

import os
import sys
from http.client import HTTPConnection

port = int(os.environ.get("SAGEMAKER_BIND_TO_PORT") or 8080)
connection = HTTPConnection("127.0.0.1", port, timeout=4)
connection.request("GET", "/ping")
sys.exit(connection.getresponse().status != 200)
