"""One page that shows a store: data gathered from manifests, and the page that draws it."""
