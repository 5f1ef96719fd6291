"""Why it works: the paper's studies on handwritten digits (Table 1, Fig. 6, Fig. 9)."""
