"""What a test runs under parent_watch: a process with a child that ignores every signal it can."""

import subprocess
import sys

IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

child = subprocess.Popen([sys.executable, "-c", IGNORES])
print(flush=True)
child.wait()
