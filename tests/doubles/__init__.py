"""Small real implementations in place of devices, libraries, remotes and DJL, and the models that they run."""
