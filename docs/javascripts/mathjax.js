// Formulas, as Material for MkDocs documents it. Without a network they stay readable as TeX.
window.MathJax = {
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]], processEscapes: true, processEnvironments: true },
  options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
  // `document$` announces the first page, too. Typeset twice, a formula holds a second one for screen readers.
  startup: { typeset: false, ready: () => (MathJax.startup.defaultReady(), document$.subscribe(typeset)) },
};

function typeset() {
  MathJax.startup.output.clearCache();
  MathJax.typesetClear();
  MathJax.texReset();
  MathJax.typesetPromise();
}
