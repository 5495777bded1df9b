"""Workers in one host against hosts: weak and strong scaling, rates, and the planner beside it."""
