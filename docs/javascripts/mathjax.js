// Formulas, as Material for MkDocs documents it. Without a network they stay readable as TeX.
window.MathJax = {
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]], processEscapes: true, processEnvironments: true },
  options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
  // `document$` also announces the first page. If MathJax typeset it at startup as well, a screen reader would read
  // every formula twice.
  startup: { typeset: false, ready: () => (MathJax.startup.defaultReady(), document$.subscribe(typeset)) },
};

function typeset() {
  MathJax.startup.output.clearCache();
  MathJax.typesetClear();
  MathJax.texReset();
  MathJax.typesetPromise();
}
