"""Options, model and machine to a plan and findings."""
