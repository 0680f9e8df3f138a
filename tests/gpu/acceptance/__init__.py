"""The acceptance tests on a real GPU machine; tests/gpu/run is the program."""
