"""Add to pyproject.toml what it cannot say: the long description, README.md with links that work outside of a clone."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = (ROOT / "pyproject.toml").read_text()
README = (ROOT / "README.md").read_text()

# Without a repository in [project.urls], relative links and images would be dead, so only the texts of the links stay.
if repository := re.search(r'^Repository = "(.+)"', PROJECT, re.MULTILINE):
    (version,) = re.findall(r'^version = "(.+)"', PROJECT, re.MULTILINE)
    for start, kind in ((r'<img src="', "raw"), (r"\[[^]]*\]\(", "blob")):  # images, other links
        README = re.sub(rf"({start})(?!https?:|#)", rf"\g<1>{repository[1]}/{kind}/v{version}/", README)
else:
    README = re.sub(r'<img src="(?!https?:)[^>]*>\n?', "", README)
    README = re.sub(r"\[([^]]*)\]\((?!https?:|#)[^)]*\)", r"\1", README)

setup(long_description=README, long_description_content_type="text/markdown")
