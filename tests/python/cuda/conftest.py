# Scripts for a machine with a GPU, each started by itself.
collect_ignore_glob = ["test_*.py"]
