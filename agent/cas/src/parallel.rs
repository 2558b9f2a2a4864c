//! Work on blocking threads: a bounded fan-out over a slice or over what is found on the way.
//!
//! Where no more threads can be started, the work is slower, not wrong.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

/// From so many items on, a second thread is worth its start.
const SPREAD: usize = 8;

/// The results of `work` on every item, in the order of the items, by at most `threads` threads.
///
/// Items are handed out one by one, so that one large item does not hold back a whole share.
pub(crate) fn map<T, R>(items: &[T], threads: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R>
where
    T: Sync,
    R: Send,
{
    let threads = threads.min(items.len());
    if threads < 2 {
        return items.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let run = || {
        let mut done = Vec::new();
        while let Some((index, item)) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            items.get(index).map(|item| (index, item))
        } {
            done.push((index, work(item)));
        }
        done
    };
    let mut done: Vec<_> = on_threads(threads, run).into_iter().flatten().collect();
    done.sort_unstable_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Does `work` on every item, in place, by at most `threads` threads, each with a state of its own. The first error
/// ends it: no item is begun after that.
pub(crate) fn each<T, O, E>(
    items: &mut [T],
    threads: usize,
    own: impl Fn() -> O + Sync,
    work: impl Fn(&mut O, &mut T) -> Result<(), E> + Sync,
) -> Result<(), E>
where
    T: Send,
    E: Send,
{
    let threads = threads.min(items.len() / SPREAD);
    let left = Mutex::new(items.iter_mut());
    let run = || {
        let mut own = own();
        loop {
            let Some(item) = left.lock().next() else { return Ok(()) };
            if let Err(error) = work(&mut own, item) {
                *left.lock() = Default::default();
                return Err(error);
            }
        }
    };
    on_threads(threads, run).into_iter().collect()
}

/// Does `work` on `first` and on every item that it finds on the way, by at most `threads` threads; the results
/// in no order. The first error ends it.
pub(crate) fn grow<T, R, E>(
    first: T,
    threads: usize,
    work: impl Fn(T, &mut Vec<T>) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E>
where
    T: Send,
    R: Send,
    E: Send,
{
    let (mut items, mut done) = (vec![first], Vec::new());
    while items.len() < SPREAD
        && let Some(item) = items.pop()
    {
        done.push(work(item, &mut items)?);
    }
    if items.is_empty() {
        return Ok(done);
    }
    let (left, news) = (Mutex::new(Left { items, busy: 0, waiting: 0 }), Condvar::new());
    let run = || {
        let (mut done, mut found) = (Vec::new(), Vec::new());
        while let Some((item, _busy)) = next(&left, &news) {
            match work(item, &mut found) {
                Ok(result) => done.push(result),
                Err(error) => {
                    left.lock().items.clear();
                    return Err(error);
                }
            }
            left.lock().items.append(&mut found);
        }
        Ok(done)
    };
    for part in on_threads(threads, run) {
        done.append(&mut part?);
    }
    Ok(done)
}

/// What is left of work that grows: when nobody is busy, no more will be found.
struct Left<T> {
    items: Vec<T>,
    busy: usize,
    waiting: usize,
}

/// A thread works on an item. Dropping this, even by a panic, wakes the threads that wait for it.
struct Busy<'a, T> {
    left: &'a Mutex<Left<T>>,
    news: &'a Condvar,
}

impl<T> Drop for Busy<'_, T> {
    fn drop(&mut self) {
        let mut left = self.left.lock();
        left.busy -= 1;
        // To notify is a call to the system even when nobody waits, which is nearly always.
        if left.waiting > 0 {
            self.news.notify_all();
        }
    }
}

fn next<'a, T>(left: &'a Mutex<Left<T>>, news: &'a Condvar) -> Option<(T, Busy<'a, T>)> {
    let mut guard = left.lock();
    loop {
        if let Some(item) = guard.items.pop() {
            guard.busy += 1;
            return Some((item, Busy { left, news }));
        }
        if guard.busy == 0 {
            return None;
        }
        guard.waiting += 1;
        news.wait(&mut guard);
        guard.waiting -= 1;
    }
}

/// What `run` returns on this thread and on up to `threads - 1` further ones.
fn on_threads<R: Send>(threads: usize, run: impl Fn() -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let helper = |_| std::thread::Builder::new().spawn_scoped(scope, &run).ok();
        let helpers: Vec<_> = (1..threads).map_while(helper).collect();
        let mut results = vec![run()];
        for helper in helpers {
            match helper.join() {
                Ok(result) => results.push(result),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        results
    })
}

/// As many threads as the machine ran at once when this was first asked: to find it out takes a dozen system calls.
pub(crate) fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_map_keeps_the_order_of_the_items() {
        let items: Vec<u32> = (0..1000).collect();
        for threads in [0, 1, 2, 7] {
            assert_eq!(map(&items, threads, |n| n * 2), items.iter().map(|n| n * 2).collect::<Vec<_>>());
        }
    }

    #[test]
    fn test_each_reaches_every_item_once_and_none_after_an_error() {
        for threads in [0, 1, 2, 7] {
            let mut items: Vec<u32> = (0..1000).collect();
            let add = |one: &mut u32, n: &mut u32| {
                *n += *one;
                Ok::<(), ()>(())
            };
            each(&mut items, threads, || 1, add).unwrap();
            assert_eq!(items, (1..=1000).collect::<Vec<_>>());
            let reached = AtomicUsize::new(0);
            let refuse = |_: &mut (), _: &mut u32| {
                reached.fetch_add(1, Ordering::Relaxed);
                Err("no")
            };
            assert_eq!(each(&mut items, threads, || (), refuse), Err("no"));
            assert!(reached.into_inner() <= threads.max(1));
        }
    }

    #[test]
    fn test_grow_reaches_all_that_is_found_and_ends_with_an_error() {
        let halves = |n: u32, found: &mut Vec<u32>| {
            if n > 1 {
                found.extend([n / 2, n - n / 2]);
            }
            Ok::<_, u32>(usize::from(n == 1))
        };
        for threads in [0, 1, 2, 7] {
            for size in [1, 2, 3, 1000] {
                let ones: usize = grow(size, threads, halves).unwrap().into_iter().sum();
                assert_eq!(ones, size as usize);
            }
            let refuse = |n, found: &mut Vec<u32>| match halves(n, found) {
                Ok(1) => Err(n),
                other => other,
            };
            assert_eq!(grow(1000, threads, refuse), Err(1));
        }
    }
}
