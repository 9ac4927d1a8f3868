"""The folder that one run of the tests shares with the ranks that it starts."""

# The environment variable that holds it: it reaches every process, the server that ranks are forked from too.
SESSION_FOLDER = "MEGATRON_TEST_FOLDER"
