"""Runs `octavo.engine.compilation.export` as on a machine without a C++ compiler."""

from octavo.engine.compilation import export

if __name__ == "__main__":
    export.has_compiler = lambda: False
    export.main()
