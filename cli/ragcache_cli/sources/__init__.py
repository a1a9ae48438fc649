"""Where documents come from: folders, the web, git; each read into files on this machine.

A source is somebody else's: nothing it holds names a path here, takes more than its share of the
scratch folder, or is run.
"""
