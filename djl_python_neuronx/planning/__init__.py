"""Planning: from options, model and machine to a plan and findings."""
