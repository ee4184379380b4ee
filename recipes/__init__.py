"""Training recipes for verl with rhyme_verl; see README.md."""
