"""What `mlacheck init STAGE` prints: one self-contained, working check for each stage."""
