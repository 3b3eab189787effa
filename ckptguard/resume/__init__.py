"""Does a run that was saved and resumed go on exactly as the uninterrupted one? Arms, recording, comparison, verdict."""
