"""Where the weights are: central servers, servers beside the workers, or all-reduce."""
