"""The dossier: four printed pages about one protection, for a person who decides and is no researcher."""
