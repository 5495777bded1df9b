"""Today's code compared with its peers; a result is stale once the code it measures has changed."""
