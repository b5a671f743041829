// The page in Chromium: node page.mjs URL CHROMIUM FOLDER. A line of JSON for each view, screenshots in FOLDER.
import fs from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const [url, executablePath, folder] = process.argv.slice(2);
const axe = fs.readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const browser = await chromium.launch({executablePath, args: ["--no-sandbox"]});
for (const scheme of ["light", "dark"]) for (const width of [400, 1200]) {
  const context = await browser.newContext({viewport: {width, height: 900}, colorScheme: scheme, bypassCSP: true});
  const page = await context.newPage(), errors = [];
  page.on("console", message => message.type() === "error" && errors.push(message.text()));
  page.on("pageerror", error => errors.push(String(error)));
  page.on("request", request => request.url().startsWith(url) || request.url().startsWith("data:")
    || errors.push(`asks elsewhere: ${request.url()}`));
  await page.goto(url);
  await page.waitForFunction(() => document.querySelector("#method").options.length > 0);
  // As somebody without a mouse does it.
  await page.focus("#prompt");
  await page.keyboard.press("Control+A");
  await page.keyboard.type("the cat sat on the mat");
  await page.evaluate(() => { document.querySelector("#settings").open = true; });
  await page.selectOption("#method", "opt");
  await page.fill("#temperature", "1.5");
  await page.evaluate(() => {
    window.lengths = [];
    new MutationObserver(() => window.lengths.push(document.querySelector("#cascade-text").children.length))
      .observe(document.querySelector("#cascade-text"), {childList: true});
  });
  await page.evaluate(wide => { document.querySelector("#settings").open = wide; }, width > 640);
  await page.focus("#run");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector("#status").textContent.startsWith("Done"), null, {timeout: 60000});
  await page.screenshot({path: `${folder}/${scheme}_${width}.png`, fullPage: true});
  await page.evaluate(axe);
  const found = await page.evaluate(() => axe.run());
  console.log(JSON.stringify({
    scheme, width, errors, violations: found.violations.map(one => `${one.id} (${one.impact})`),
    method: await page.inputValue("#method"),
    ...await page.evaluate(() => ({
      folds: !document.querySelector("#settings").open, status: document.querySelector("#status").textContent,
      bottom: document.querySelector("#cascade-text").getBoundingClientRect().bottom + window.scrollY,
      split: [...document.querySelectorAll("#cascade-text span + span")].filter(span =>
        span.className && span.className === span.previousElementSibling.className).length,
      grew: new Set(window.lengths).size > 1, scrolls: document.documentElement.scrollWidth,
      written: document.querySelectorAll("#cascade-text .draft, #cascade-text .correction, #cascade-text .bonus").length,
      verifier: document.querySelectorAll("#verifier-text span").length}))}));
  await context.close();
}
await browser.close();
