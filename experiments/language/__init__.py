"""The paper's language experiments (CoLA, SST-2) and a noisy task of the kind users have (Banking77)."""
