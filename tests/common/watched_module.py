"""A program for tests of parent_watch: its child ignores every signal that it can."""

import subprocess
import sys

IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

child = subprocess.Popen([sys.executable, "-c", IGNORES])
print(flush=True)
child.wait()
