//! The search space: a distribution for each hyperparameter.
//!
//! Owns the ten distributions, how a number between 0 and 1 becomes a value of each, and the points of a grid.
//! A choice may have alternatives that are spaces themselves: then the names of the alternative that was drawn have
//! values, and those of the others have none.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use super::Values;
use crate::fault::{Code, Fault};

/// A value of a hyperparameter, as it was written or drawn: `16` is never `16.0`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Scalar {
    /// A whole number.
    Whole(i64),
    /// Another number; always finite.
    Number(f64),
    /// A text.
    Text(String),
}

impl Scalar {
    /// A plain value of a document. A truth value is written as Python prints it.
    pub fn read(text: &str) -> Scalar {
        match text {
            "true" => return Scalar::Text("True".to_owned()),
            "false" => return Scalar::Text("False".to_owned()),
            _ => {}
        }
        let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
        if digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
            if let Ok(whole) = text.parse() {
                return Scalar::Whole(whole);
            }
            if let Some(number) = text.parse().ok().filter(|number: &f64| number.is_finite()) {
                return Scalar::Number(number);
            }
        }
        Scalar::Text(text.to_owned())
    }

    /// As it is sent: JSON, so that a number stays one.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default() // a text or a finite number always serialises
    }

    /// From what [`Scalar::to_json`] wrote; any other text is a text.
    pub fn from_json(json: &str) -> Scalar {
        serde_json::from_str(json).unwrap_or_else(|_| Scalar::Text(json.to_owned()))
    }

    /// The multiple of `q` that is next to a number, the even one of two; whole if `q` is.
    pub fn multiple(number: f64, q: f64) -> Scalar {
        rounded(number, q)
    }
}

/// As the command gets it: the shortest text that is read as the same number.
impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scalar::Whole(whole) => whole.fmt(f),
            Scalar::Number(number) => write!(f, "{number:?}"),
            Scalar::Text(text) => f.write_str(text),
        }
    }
}

/// One of several values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Alternative {
    /// A plain value.
    Value(Scalar),
    /// Values for several names at once.
    Space(Space),
}

impl Alternative {
    /// It has names of its own.
    pub fn is_space(&self) -> bool {
        matches!(self, Alternative::Space(_))
    }
}

/// What a value is drawn from. Bounds of the logarithmic ones are logarithms.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names are the field's")]
pub enum Distribution {
    Choice(Vec<Alternative>),
    Randint { upper: u64 },
    Uniform { min: f64, max: f64 },
    Quniform { min: f64, max: f64, q: f64 },
    Loguniform { min: f64, max: f64 },
    Qloguniform { min: f64, max: f64, q: f64 },
    Normal { mu: f64, sigma: f64 },
    Qnormal { mu: f64, sigma: f64, q: f64 },
    Lognormal { mu: f64, sigma: f64 },
    Qlognormal { mu: f64, sigma: f64, q: f64 },
}

impl Distribution {
    /// Every word for one.
    pub const WORDS: [&'static str; 10] = [
        "choice",
        "randint",
        "uniform",
        "quniform",
        "loguniform",
        "qloguniform",
        "normal",
        "qnormal",
        "lognormal",
        "qlognormal",
    ];

    /// The word for it.
    pub fn name(&self) -> &'static str {
        match self {
            Distribution::Choice(_) => "choice",
            Distribution::Randint { .. } => "randint",
            Distribution::Uniform { .. } => "uniform",
            Distribution::Quniform { .. } => "quniform",
            Distribution::Loguniform { .. } => "loguniform",
            Distribution::Qloguniform { .. } => "qloguniform",
            Distribution::Normal { .. } => "normal",
            Distribution::Qnormal { .. } => "qnormal",
            Distribution::Lognormal { .. } => "lognormal",
            Distribution::Qlognormal { .. } => "qlognormal",
        }
    }

    /// The value that a share of all draws lies below; of a choice its place is meant, see [`Space::at`].
    fn at(&self, share: f64, logbase: Option<f64>) -> Scalar {
        let exp = |x: f64| logbase.map_or_else(|| x.exp(), |base| base.powf(x));
        let between = |min: f64, max: f64| min + share * (max - min);
        let bell = |mu: f64, sigma: f64| mu + sigma * quantile(share);
        match *self {
            Distribution::Choice(_) => Scalar::Whole(0),
            Distribution::Randint { upper } => {
                Scalar::Whole(((share * upper as f64) as u64).min(upper.saturating_sub(1)).cast_signed())
            }
            Distribution::Uniform { min, max } => plain(between(min, max)),
            Distribution::Quniform { min, max, q } => rounded(between(min, max), q),
            Distribution::Loguniform { min, max } => plain(exp(between(min, max))),
            Distribution::Qloguniform { min, max, q } => rounded(exp(between(min, max)), q),
            Distribution::Normal { mu, sigma } => plain(bell(mu, sigma)),
            Distribution::Qnormal { mu, sigma, q } => rounded(bell(mu, sigma), q),
            Distribution::Lognormal { mu, sigma } => plain(exp(bell(mu, sigma))),
            Distribution::Qlognormal { mu, sigma, q } => rounded(exp(bell(mu, sigma)), q),
        }
    }

    fn check(&self, name: &str) -> Result<(), Fault> {
        let wrong = |why: String, fix: &str| {
            let what = format!("`search_space.{name}` is no `{}` that can be drawn from", self.name());
            Err(Fault::new(Code::JobInvalid, what).why(why).fix(fix))
        };
        let (ordered, width, q) = match *self {
            Distribution::Choice(ref among) if among.is_empty() => {
                return wrong("it has no `values`".to_owned(), "list at least one value");
            }
            Distribution::Choice(ref among) => {
                return among.iter().try_for_each(|alternative| match alternative {
                    Alternative::Space(space) => space.check(),
                    Alternative::Value(_) => Ok(()),
                });
            }
            Distribution::Randint { upper } if upper == 0 || i64::try_from(upper).is_err() => {
                return wrong(format!("`upper` is {upper}"), "write a whole number of at least 1");
            }
            Distribution::Randint { .. } => return Ok(()),
            Distribution::Uniform { min, max } | Distribution::Loguniform { min, max } => {
                (Some((min, max)), None, None)
            }
            Distribution::Quniform { min, max, q } | Distribution::Qloguniform { min, max, q } => {
                (Some((min, max)), None, Some(q))
            }
            Distribution::Normal { mu, sigma } | Distribution::Lognormal { mu, sigma } => {
                (None, Some((mu, sigma)), None)
            }
            Distribution::Qnormal { mu, sigma, q } | Distribution::Qlognormal { mu, sigma, q } => {
                (None, Some((mu, sigma)), Some(q))
            }
        };
        if let Some((min, max)) =
            ordered.filter(|(min, max)| !(min.is_finite() && max.is_finite() && min < max))
        {
            return wrong(
                format!("`min_value` is {min} and `max_value` is {max}"),
                "write two numbers, the lower one as `min_value`",
            );
        }
        if let Some((mu, sigma)) =
            width.filter(|(mu, sigma)| !(mu.is_finite() && sigma.is_finite() && *sigma > 0.0))
        {
            return wrong(
                format!("`mu` is {mu} and `sigma` is {sigma}"),
                "write two numbers, `sigma` above 0",
            );
        }
        match q.filter(|q| !(q.is_finite() && *q > 0.0)) {
            Some(q) => wrong(format!("`q` is {q}"), "write a number above 0: values are multiples of it"),
            None => Ok(()),
        }
    }
}

/// A number as a value. One beyond all numbers is the largest.
fn plain(number: f64) -> Scalar {
    Scalar::Number(number.clamp(f64::MIN, f64::MAX))
}

/// See [`Scalar::multiple`].
fn rounded(number: f64, q: f64) -> Scalar {
    let multiple = (number.clamp(f64::MIN, f64::MAX) / q).round_ties_even() * q;
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match q.fract() == 0.0 && multiple.abs() < EXACT {
        true => Scalar::Whole(multiple as i64),
        false => plain(multiple),
    }
}

/// The inverse of the normal distribution: below it lies this share of all draws. Acklam's formula, whose error is
/// less than a billionth.
fn quantile(share: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969_683_028_665_376e1,
        2.209_460_984_245_205e2,
        -2.759_285_104_469_687e2,
        1.383_577_518_672_69e2,
        -3.066_479_806_614_716e1,
        2.506_628_277_459_239,
    ];
    const B: [f64; 5] = [
        -5.447_609_879_822_406e1,
        1.615_858_368_580_409e2,
        -1.556_989_798_598_866e2,
        6.680_131_188_771_972e1,
        -1.328_068_155_288_572e1,
    ];
    const C: [f64; 6] = [
        -7.784_894_002_430_293e-3,
        -3.223_964_580_411_365e-1,
        -2.400_758_277_161_838,
        -2.549_732_539_343_734,
        4.374_664_141_464_968,
        2.938_163_982_698_783,
    ];
    const D: [f64; 4] =
        [7.784_695_709_041_462e-3, 3.224_671_290_700_398e-1, 2.445_134_137_142_996, 3.754_408_661_907_416];
    const LOW: f64 = 0.02425;
    let of = |coefficients: &[f64], x: f64| coefficients.iter().fold(0.0, |sum, c| sum * x + c);
    let tail = |share: f64| {
        let x = (-2.0 * share.ln()).sqrt();
        of(&C, x) / (of(&D, x) * x + 1.0)
    };
    let share = share.clamp(1e-12, 1.0 - 1e-12);
    match share {
        _ if share < LOW => tail(share),
        _ if share > 1.0 - LOW => -tail(1.0 - share),
        _ => {
            let (x, square) = (share - 0.5, (share - 0.5) * (share - 0.5));
            of(&A, square) * x / (of(&B, square) * square + 1.0)
        }
    }
}

/// A distribution for each name.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Space(pub BTreeMap<String, Distribution>);

impl Space {
    /// Every name that a trial may have a value for.
    pub fn names(&self) -> BTreeSet<&str> {
        let mut names = BTreeSet::new();
        for (name, distribution) in &self.0 {
            let inner = nested(distribution).collect::<Vec<_>>();
            if plain_values(distribution) || inner.is_empty() {
                names.insert(name.as_str());
            }
            inner.into_iter().for_each(|space| names.extend(space.names()));
        }
        names
    }

    /// Every distribution in it, those of nested spaces among them, in the order in which they are drawn.
    pub fn leaves(&self) -> Vec<(&str, &Distribution)> {
        let mut leaves = Vec::new();
        for (name, distribution) in &self.0 {
            leaves.push((name.as_str(), distribution));
            nested(distribution).for_each(|space| leaves.extend(space.leaves()));
        }
        leaves
    }

    /// The values at a point of the unit cube, whose coordinate of a dimension `share` says. A dimension is the place of
    /// a distribution in [`Space::leaves`].
    pub fn at(&self, share: &impl Fn(usize) -> f64, logbase: Option<f64>) -> Values {
        let mut values = Values::new();
        self.draw(share, logbase, 0, &mut values);
        values
    }

    fn draw(
        &self,
        share: &impl Fn(usize) -> f64,
        logbase: Option<f64>,
        mut dimension: usize,
        to: &mut Values,
    ) {
        for (name, distribution) in &self.0 {
            let here = share(dimension);
            dimension += 1;
            let Distribution::Choice(among) = distribution else {
                to.insert(name.clone(), distribution.at(here, logbase));
                continue;
            };
            let chosen = ((here * among.len() as f64) as usize).min(among.len().saturating_sub(1));
            for (index, alternative) in among.iter().enumerate() {
                match alternative {
                    Alternative::Value(value) if index == chosen => {
                        drop(to.insert(name.clone(), value.clone()))
                    }
                    Alternative::Value(_) => {}
                    Alternative::Space(space) => {
                        if index == chosen {
                            space.draw(share, logbase, dimension, to);
                        }
                        dimension += space.leaves().len();
                    }
                }
            }
        }
    }

    /// How many points its grid has, if every distribution is a choice.
    pub fn points(&self) -> u64 {
        self.0.values().map(points_of).fold(1, u64::saturating_mul)
    }

    /// One point of the grid. The last name changes first.
    pub fn point(&self, mut index: u64) -> Values {
        let mut values = Values::new();
        for (name, distribution) in self.0.iter().rev() {
            let here = index % points_of(distribution).max(1);
            index /= points_of(distribution).max(1);
            let Distribution::Choice(among) = distribution else { continue };
            let mut before = here;
            for alternative in among {
                match alternative {
                    Alternative::Value(value) if before == 0 => {
                        values.insert(name.clone(), value.clone());
                        break;
                    }
                    Alternative::Value(_) => before -= 1,
                    Alternative::Space(space) if before < space.points() => {
                        values.append(&mut space.point(before));
                        break;
                    }
                    Alternative::Space(space) => before -= space.points(),
                }
            }
        }
        values
    }

    pub(super) fn check(&self) -> Result<(), Fault> {
        if self.0.is_empty() {
            return Err(Fault::new(Code::JobInvalid, "`search_space` names no hyperparameter")
                .fix("give each a distribution, for example `lr: {type: uniform, min_value: 0.01, max_value: 0.1}`"));
        }
        for (name, distribution) in &self.0 {
            if !is_name(name) {
                let what = format!("`search_space.{}` is no name of a hyperparameter", name.escape_default());
                return Err(Fault::new(Code::JobInvalid, what)
                    .fix("use letters, digits and `_`, not starting with a digit"));
            }
            distribution.check(name)?;
            let inside: BTreeSet<&str> = nested(distribution).flat_map(Space::names).collect();
            let elsewhere = |name: &&&str| {
                self.0.iter().any(|(other, o)| {
                    !std::ptr::eq(o, distribution)
                        && (other == **name || nested(o).any(|space| space.names().contains(**name)))
                })
            };
            if let Some(twice) = inside.iter().find(elsewhere) {
                let what = format!("`{twice}` is in `search_space` twice, and one trial could get both");
                return Err(Fault::new(Code::JobInvalid, what).fix("give one of them another name"));
            }
        }
        Ok(())
    }
}

/// `^[a-zA-Z_][a-zA-Z0-9_]*$`
fn is_name(name: &str) -> bool {
    let letter = |c: char| c.is_ascii_alphabetic() || c == '_';
    name.starts_with(letter) && name.chars().all(|c| letter(c) || c.is_ascii_digit())
}

fn plain_values(distribution: &Distribution) -> bool {
    match distribution {
        Distribution::Choice(among) => among.iter().any(|alternative| !alternative.is_space()),
        _ => true,
    }
}

fn nested(distribution: &Distribution) -> impl Iterator<Item = &Space> {
    let among: &[Alternative] = match distribution {
        Distribution::Choice(among) => among,
        _ => &[],
    };
    among.iter().filter_map(|alternative| match alternative {
        Alternative::Space(space) => Some(space),
        Alternative::Value(_) => None,
    })
}

fn points_of(distribution: &Distribution) -> u64 {
    match distribution {
        Distribution::Choice(among) => among
            .iter()
            .map(|alternative| match alternative {
                Alternative::Value(_) => 1,
                Alternative::Space(space) => space.points(),
            })
            .fold(0, u64::saturating_add),
        _ => 1,
    }
}
