"""`paceline ui`: a local web app over a results directory.

`server` answers requests and refuses those it must not, `routes` finds the page of a path, `library` knows the
campaigns and runs of the directory, `pages` renders lists, `builder` renders reports, comparisons and histories in a
process of its own. All pages are made of the components of report.html.
"""
