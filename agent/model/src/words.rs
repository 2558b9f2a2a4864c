//! Numbers of things and lengths of time as people read them.

use std::time::Duration;

/// `1 file`, `3 files`, `1 process`, `2 processes`, `1 directory`, `2 directories`.
pub fn count(count: u64, thing: &str) -> String {
    let many = || match thing {
        _ if thing.ends_with('s') => format!("{thing}es"),
        _ => match thing.strip_suffix('y') {
            Some(stem) if !stem.ends_with(['a', 'e', 'o']) => format!("{stem}ies"),
            _ => format!("{thing}s"),
        },
    };
    if count == 1 { format!("1 {thing}") } else { format!("{count} {}", many()) }
}

/// A length of time: `30 ms`, `0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`, `4 d 3 h`.
pub fn duration(length: Duration) -> String {
    let seconds = length.as_secs();
    let two = |large: u64, unit: &str, small: u64, sub: &str| match small {
        0 => format!("{large} {unit}"),
        _ => format!("{large} {unit} {small} {sub}"),
    };
    match seconds {
        0 if length.as_millis() < 100 => format!("{} ms", length.as_millis()),
        0..10 => format!("{:.1} s", length.as_secs_f64()),
        10..60 => format!("{seconds} s"),
        60..3600 => two(seconds / 60, "min", seconds % 60, "s"),
        3600..86_400 => two(seconds / 3600, "h", seconds % 3600 / 60, "min"),
        _ => two(seconds / 86_400, "d", seconds % 86_400 / 3600, "h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_one_thing_is_not_several() {
        for (number, thing, text) in [
            (1, "file", "1 file"),
            (0, "file", "0 files"),
            (3, "GPU", "3 GPUs"),
            (1, "process", "1 process"),
            (2, "process", "2 processes"),
            (2, "directory", "2 directories"),
            (2, "key", "2 keys"),
        ] {
            assert_eq!(count(number, thing), text);
        }
    }

    #[test]
    fn test_times_read_well() {
        for (ms, text) in [
            (30, "30 ms"),
            (430, "0.4 s"),
            (12_900, "12 s"),
            (200_000, "3 min 20 s"),
            (7_500_000, "2 h 5 min"),
            (7_200_000, "2 h"),
            (356_400_000, "4 d 3 h"),
        ] {
            assert_eq!(duration(Duration::from_millis(ms)), text);
        }
    }
}
