"""Today's code beside its peers; a result is stale once the code it measures has changed."""
