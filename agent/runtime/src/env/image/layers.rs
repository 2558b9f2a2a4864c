//! Summarises the engine's reports while it fetches an image: a line when a layer changes its state, and the total
//! progress.

use agent_env::{Phase, Progress};
use agent_model::size;

/// The layers of an image that is being fetched.
#[derive(Debug, Default)]
pub(super) struct Layers {
    layers: Vec<Layer>,
}

#[derive(Debug)]
struct Layer {
    id: String,
    state: State,
    bytes: u64,
    total: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Known,
    Downloading,
    Downloaded,
    Extracting,
    Done,
    Retrying,
}

impl State {
    fn of(status: &str) -> Option<State> {
        Some(match status {
            "Pulling fs layer" | "Waiting" => State::Known,
            "Downloading" => State::Downloading,
            "Verifying Checksum" | "Download complete" => State::Downloaded,
            "Extracting" => State::Extracting,
            "Pull complete" | "Already exists" => State::Done,
            _ if status.starts_with("Retrying") => State::Retrying,
            _ => return None,
        })
    }
}

/// One report of the engine.
#[derive(Debug, Default)]
pub(super) struct Told<'a> {
    pub(super) id: Option<&'a str>,
    pub(super) status: &'a str,
    pub(super) current: Option<i64>,
    pub(super) total: Option<i64>,
}

impl Layers {
    /// Takes a report; returns a line for the log, if it is worth one.
    pub(super) fn hear(&mut self, told: &Told<'_>) -> Option<String> {
        let (Some(id), Some(state)) = (told.id, State::of(told.status)) else {
            let status = told.status.trim();
            return (!status.is_empty()).then(|| status.to_owned());
        };
        let layer = self.layer(id);
        let [current, total] = [told.current, told.total].map(|n| n.and_then(|n| u64::try_from(n).ok()));
        if state == State::Downloading {
            layer.bytes = current.unwrap_or(layer.bytes);
            layer.total = total.unwrap_or(layer.total).max(layer.bytes);
        }
        if matches!(state, State::Downloaded | State::Done) {
            layer.bytes = layer.total;
        }
        if layer.state == state {
            return None;
        }
        layer.state = state;
        let size = if layer.total > 0 { format!(" ({})", size::binary(layer.total)) } else { String::new() };
        match state {
            State::Known => None,
            State::Downloading => Some(format!("layer {id}: downloading{size}")),
            State::Downloaded => Some(format!("layer {id}: downloaded{size}")),
            State::Extracting => Some(format!("layer {id}: extracting")),
            State::Done if told.status == "Already exists" => Some(format!("layer {id}: is there already")),
            State::Done => Some(format!("layer {id}: done")),
            State::Retrying => Some(format!("layer {id}: the download broke and is tried again")),
        }
    }

    /// Whether a report shows progress. Those sent while the engine waits to retry do not.
    pub(super) fn is_progress(told: &Told<'_>) -> bool {
        State::of(told.status) != Some(State::Retrying)
    }

    /// The total progress; `None` before a layer is known.
    pub(super) fn progress(&self, what: &str) -> Option<Progress> {
        let done = self.layers.iter().filter(|layer| layer.state == State::Done).count();
        (!self.layers.is_empty()).then(|| Progress {
            phase: Phase::Pull,
            done: done as u64,
            total: self.layers.len() as u64,
            bytes: self.layers.iter().map(|layer| layer.bytes).sum(),
            bytes_total: self.layers.iter().map(|layer| layer.total).sum(),
            what: what.to_owned(),
        })
    }

    fn layer(&mut self, id: &str) -> &mut Layer {
        let at = self.layers.iter().position(|layer| layer.id == id).unwrap_or_else(|| {
            self.layers.push(Layer { id: id.to_owned(), state: State::Known, bytes: 0, total: 0 });
            self.layers.len() - 1
        });
        &mut self.layers[at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told<'a>(id: &'a str, status: &'a str, current: i64, total: i64) -> Told<'a> {
        Told { id: Some(id), status, current: Some(current), total: Some(total) }
    }

    #[test]
    fn test_a_line_for_each_change_and_numbers_for_all() {
        let mut layers = Layers::default();
        assert_eq!(
            layers.hear(&Told { status: "Pulling from x", id: Some("1"), ..Told::default() }).unwrap(),
            "Pulling from x"
        );
        assert!(layers.progress("x").is_none());
        let mut lines = Vec::new();
        for told in [
            told("aa", "Pulling fs layer", 0, 0),
            told("bb", "Waiting", 0, 0),
            told("aa", "Downloading", 1_000_000, 4_000_000),
            told("aa", "Downloading", 2_000_000, 4_000_000),
            told("bb", "Retrying in 5 seconds", 0, 0),
            told("bb", "Retrying in 4 seconds", 0, 0),
            told("aa", "Download complete", 0, 0),
            told("aa", "Extracting", 1, 9),
            told("aa", "Pull complete", 0, 0),
        ] {
            lines.extend(layers.hear(&told));
        }
        assert_eq!(
            lines,
            [
                "layer aa: downloading (3.8 MiB)",
                "layer bb: the download broke and is tried again",
                "layer aa: downloaded (3.8 MiB)",
                "layer aa: extracting",
                "layer aa: done",
            ]
        );
        let progress = layers.progress("x").unwrap();
        assert_eq!((progress.done, progress.total, progress.bytes), (1, 2, 4_000_000));
        assert!(!Layers::is_progress(&told("bb", "Retrying in 4 seconds", 0, 0)));
        assert!(Layers::is_progress(&told("aa", "Extracting", 0, 0)));
    }
}
