"use strict";
// The page holds the tokens as text already; this only colours them. Weights are in thousandths.
const STRONGEST = 0.75; // opacity of the largest weight: the text on it stays readable
const layers = JSON.parse(document.getElementById("data").textContent);
const tokens = Array.from(document.getElementById("text").children);
const layerChoice = document.getElementById("layer");
const activationChoice = document.getElementById("activation");

function fill(select, names) {
  const before = select.selectedIndex;
  select.replaceChildren(...names.map((name) => {
    const option = document.createElement("option");
    option.textContent = name;
    return option;
  }));
  select.selectedIndex = Math.max(0, Math.min(before, names.length - 1));
}

function shade(colour, strength) {
  const [red, green, blue] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return `rgba(${red}, ${green}, ${blue}, ${(strength * STRONGEST).toFixed(3)})`;
}

function show(id, text) {
  document.getElementById(id).textContent = text;
}

function paint() {
  const layer = layers[layerChoice.selectedIndex];
  const k = activationChoice.selectedIndex;
  const weights = layer.weights[k], label = layer.labels[k], colour = layer.colours[k];
  const low = Math.min(...weights), high = Math.max(...weights);
  tokens.forEach((token, i) => {
    token.style.backgroundColor = shade(colour, (weights[i] - low) / Math.max(high - low, 1));
    token.title = `${label} ${(weights[i] / 1000).toFixed(3)}`;
  });
  document.getElementById("ramp").style.background =
    `linear-gradient(to right, ${shade(colour, 0)}, ${shade(colour, 1)})`;
  show("low", (low / 1000).toFixed(3));
  show("high", (high / 1000).toFixed(3));
  show("mean", `mean ${layer.means[k].toFixed(3)}`);
}

function chooseLayer() {
  fill(activationChoice, layers[layerChoice.selectedIndex].labels);
  paint();
}

layerChoice.addEventListener("change", chooseLayer);
activationChoice.addEventListener("change", paint);
fill(layerChoice, layers.map((layer) => layer.name));
fill(activationChoice, layers[0].labels);
activationChoice.selectedIndex = layers[0].most_varied;
paint();
